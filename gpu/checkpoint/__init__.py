"""Reading model files: GGUF and Hugging Face folders, without PyTorch, without pickle, without remote code."""

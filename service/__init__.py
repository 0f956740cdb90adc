"""The serving side: gRPC front end, text and tokens, configuration, the engine process."""

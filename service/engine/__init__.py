"""The engine: scheduler and device in one loop, in a process of its own."""

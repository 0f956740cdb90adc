"""The device layer: runs one step on a device. The CPU is a device, and the default."""

"""Backends: the operations a decoder needs, one implementation per kind of device, one contract for all."""

"""Traces of devices: the event record of all backends, its columns, and the files that contain them."""

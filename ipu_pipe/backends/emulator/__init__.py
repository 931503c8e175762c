"""The exact single-process emulator."""

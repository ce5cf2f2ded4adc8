"""Environments and adapters to other people's environments. No torch at import."""

"""The wire: records, messages, frames, server side, client side, keys. No torch."""

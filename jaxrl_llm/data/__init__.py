"""From files on disk to token ids, and from sequences to packed rows."""

"""Codecs: tensors packed into fewer bytes and restored, exactly or with a stated error."""

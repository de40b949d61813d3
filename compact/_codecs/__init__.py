"""Codecs: tensors made smaller and given back, exactly or with a stated error."""

"""The operations of `native.py` in torch's own functions, for variants that come without a compiled library."""

"""A character-level transformer on Python's own source, trained by AdamW and by Muon: what `make demo` runs."""

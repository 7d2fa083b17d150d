"""Pictures of a run: of its log, of a checkpoint, of a profiler's trace; each light and dark, as PNG and as SVG."""

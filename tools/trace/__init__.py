"""Shows which functions and files a step of the optimizer goes through."""

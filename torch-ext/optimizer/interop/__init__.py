"""Interoperation with other projects: their names, saved states and optimizer factories."""

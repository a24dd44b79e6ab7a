"""The numerics contract as a suite that anyone can run on their backend."""

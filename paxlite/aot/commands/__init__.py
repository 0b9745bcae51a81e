"""The commands of compilation for other machines."""

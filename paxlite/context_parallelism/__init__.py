"""Attention of rows that are split over the mesh axis context."""

"""Mixtures of experts: routers, dispatch, and matmuls of groups of rows."""

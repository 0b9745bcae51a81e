"""How matmuls are computed: bf16, FP8, int8, and weights kept in other forms."""

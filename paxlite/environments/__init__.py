"""Tasks of other packages as environments: reasoning-gym and verifiers."""

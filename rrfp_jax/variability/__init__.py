"""How long tasks take where it varies: recorded or drawn, without jax or clocks."""

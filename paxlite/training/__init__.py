"""The train step, the loop around it, and the states that it saves and restores."""

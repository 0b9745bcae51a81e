"""How the processes of a run find each other, agree, and end."""

"""The attributes of each subject, with their checks and configs."""

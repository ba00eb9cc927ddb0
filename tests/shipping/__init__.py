"""What a user installs: archives, their types, and what they say of themselves."""

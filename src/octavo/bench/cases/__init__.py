"""What is measured, a file a section."""

"""What a rank holds outside of its device."""

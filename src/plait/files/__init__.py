"""Files: everything that people or machines hand us is read here, with limits; what we leave is written whole."""

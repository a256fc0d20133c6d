"""What equals what: equations, in the words of the ops."""

"""Lightning callbacks of the methods' local fits."""

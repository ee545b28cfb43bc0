"""The parts of `top`: where its figures come from, what is shown of them, and the terminal that shows it."""

"""`slime-retool plan`: what a run will need and how long it will take, from its flags alone. Imports no torch."""

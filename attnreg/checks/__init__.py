"""Where nonsense stops: each `take_...` checks one group of a call's arguments, and puts them on the call."""

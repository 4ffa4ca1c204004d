"""The commands of `eggpu`, a module each: `add` gives a command its flags, `run` runs it."""

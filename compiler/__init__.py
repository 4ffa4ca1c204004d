"""eggpu's compiler: traced programs in, plans out. It never touches a device."""

from . import library as library  # attaches NumPy's operators to Array

"""Random calls of every public class and function: ``python -m tests.fuzz``, or ``make fuzz``.

A call is made by a list of choices, small ones being simple (:mod:`tests.fuzz.source`), so that every call can be made
again and a failing one made simpler. :mod:`tests.fuzz.domains` holds the values of each kind of argument, right and
wrong; :mod:`tests.fuzz.calls` and :mod:`tests.fuzz.modules` hold the public names with the kinds of their arguments;
:mod:`tests.fuzz.judge` holds what a call must do.
"""

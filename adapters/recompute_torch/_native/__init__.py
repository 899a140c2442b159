"""The native path: the same block below Python, in C++, built for the installed torch.

tracker.cpp    the tracker; its files are in the order in which they are read
build          builds it, and keeps builds for the user
load           checks a build, and loads it
block          `rt.budget(native=True)`
"""

"""Subclasses that replace verl's own classes in verl's registries, for trainers and engines alike."""


def subclass(mixin: type, held: type, host: type, place: str) -> type:
    """The class to register: a subclass of `held` with our mixin, or `held` itself if it has the mixin already.

    Args:
        mixin: our part.
        held: the class in the registry: verl's own, or a subclass of it that another plugin has put there.
        host: verl's own class.
        place: what the class is registered as, for the message.

    Raises:
        RuntimeError: another plugin has replaced verl's class already.
    """
    if issubclass(held, mixin):
        return held
    if not issubclass(held, host):
        raise RuntimeError(f"verl's {place} was already replaced by {held}; OAR cannot replace it too.")
    name = f"Oar{held.__name__.removeprefix('PPO')}"
    return type(name, (mixin, held), {"host": held, "__module__": mixin.__module__})

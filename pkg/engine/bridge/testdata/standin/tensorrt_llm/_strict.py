"""Configuration classes with checked fields, in place of the real package's pydantic models.

A field is (converter, default). Converters accept what the real models' lax mode accepts where
a caller can notice: "true" and 1 are true, "3" and 3.0 are 3, anything else is refused.
"""
_TRUE = {"true", "t", "yes", "y", "on", "1"}
_FALSE = {"false", "f", "no", "n", "off", "0"}


def boolean(v):
    if isinstance(v, bool):
        return v
    if isinstance(v, (int, float)) and v in (0, 1):
        return bool(v)
    if isinstance(v, str) and v.lower() in _TRUE | _FALSE:
        return v.lower() in _TRUE
    raise ValueError(f"{v!r} is no boolean")


def integer(v):
    if isinstance(v, str):
        return int(v)
    if isinstance(v, (int, float)) and v == int(v):
        return int(v)
    raise ValueError(f"{v!r} is no integer")


def number(v):
    if isinstance(v, (int, float, str)):
        return float(v)
    raise ValueError(f"{v!r} is no number")


def text(v):
    if isinstance(v, str):
        return v
    raise ValueError(f"{v!r} is no text")


def anything(v):
    return v


def optional(convert):
    return lambda v: None if v is None else convert(v)


def choice(*allowed):
    def convert(v):
        if v in allowed:
            return v
        raise ValueError(f"{v!r} is none of {allowed}")
    return convert


def section(cls):
    def convert(v):
        if isinstance(v, cls):
            return v
        if isinstance(v, dict):
            return cls(**v)
        raise ValueError(f"{v!r} is no {cls.__name__}")
    return convert


class Strict:
    """Refuses unknown keys unless a subclass sets EXTRA."""
    FIELDS = {}
    EXTRA = False

    def __init__(self, **values):
        self._given = set(values)
        for name, (convert, default) in self.FIELDS.items():
            value = default() if isinstance(default, type) else default
            if name in values:
                try:
                    value = convert(values.pop(name))
                except (TypeError, ValueError) as e:
                    raise ValueError(f"{type(self).__name__}.{name}: {e}") from None
            setattr(self, name, value)
        if values and not self.EXTRA:
            raise ValueError(f"{type(self).__name__} has no field {', '.join(sorted(values))}")
        self.__dict__.update(values)
        self.model_extra = values

    @classmethod
    def _names(cls):
        return dict(cls.FIELDS)

    def model_dump(self, exclude_unset=False, **_mode):
        out = {}
        for name, value in vars(self).items():
            if name.startswith("_") or name == "model_extra" or (exclude_unset and name not in self._given):
                continue
            out[name] = value.model_dump(exclude_unset) if isinstance(value, Strict) else value
        return out


def model(cls):
    """Class decorator: gives the names of the fields where the real models have them."""
    cls.model_fields = cls._names()
    return cls

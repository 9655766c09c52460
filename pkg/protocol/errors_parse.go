package protocol

// ParseErrorJSON reads an error object, as a prologue carries it. Errors are
// *DecodeError and *FieldError.
func ParseErrorJSON(b []byte) (*Error, error) {
	v, err := DecodeValue(CodecJSON, b)
	if err != nil {
		return nil, err
	}
	p := &fieldReader{}
	m := p.object("error", v)
	if v == nil {
		p.fail("error", "not a map")
	}
	e := p.errorObject("error", m)
	if p.err != nil {
		return nil, p.err
	}
	return e, nil
}

// errorObject reads an error the way the frontend does. The depth of the tree
// is bounded by the decoder.
func (p *fieldReader) errorObject(path string, m Map) *Error {
	e := &Error{
		Type:    p.legacyType(path+".error_type", m["error_type"]),
		Message: p.text(path+".message", m["message"]),
	}
	if m["diagnostic"] != nil {
		e.Message = p.text(path+".diagnostic", m["diagnostic"])
	}
	class := Class(p.text(path+".class", m["class"]))
	reason := Reason(p.text(path+".reason", m["reason"]))
	e.Class, e.Reason = normalise(e.Type, class, reason)
	if v := m["public"]; v != nil {
		e.Public = p.public(path+".public", p.object(path+".public", v))
	}
	if v := m["caused_by"]; v != nil {
		e.Cause = p.errorObject(path+".caused_by", p.object(path+".caused_by", v))
	}
	return e
}

// legacyType reads a string or {"Backend": string}; what is unknown is Unknown.
func (p *fieldReader) legacyType(path string, v any) LegacyType {
	var t LegacyType
	switch v := v.(type) {
	case nil:
	case string:
		t = plain(v)
	case Map:
		name, ok := v["Backend"].(string)
		if !ok || len(v) != 1 {
			p.fail(path, "not a known form")
		}
		t = backend(name)
	default:
		p.fail(path, "not a string or a map")
	}
	if _, known := reasonOfLegacy[t]; !known {
		return LegacyType{Name: "Unknown", Backend: t.Backend}
	}
	return t
}

// normalise fills in what a writer left out and degrades what does not fit.
func normalise(t LegacyType, class Class, reason Reason) (Class, Reason) {
	derived := reasonOfLegacy[t]
	if class == "" {
		class = catalogue[derived].class
	}
	if reason == "" {
		reason = derived
		if catalogue[derived].class != class {
			reason = reasonOfClass[class]
		}
	}
	if e, ok := catalogue[reason]; !ok || e.class != class {
		return ClassInternal, ReasonRuntimeInvalidError
	}
	return class, reason
}

func (p *fieldReader) public(path string, m Map) *Public {
	pub := &Public{
		Type:    p.text(path+".type", m["type"]),
		Message: p.text(path+".message", m["message"]),
	}
	for _, f := range []struct {
		key string
		to  **int64
	}{{"limit", &pub.Limit}, {"actual", &pub.Actual}} {
		if v := m[f.key]; v != nil {
			n, ok := v.(int64)
			if !ok {
				p.fail(path+"."+f.key, "not an integer in range")
			}
			*f.to = &n
		}
	}
	return pub
}

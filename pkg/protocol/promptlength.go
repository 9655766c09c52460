package protocol

// PromptLength is how many token ids a request body holds, found without
// decoding it: what a limit on tokens needs to know before a request is taken
// up. It is 0 for a body that has none or that cannot be read that far;
// ParseRequest is the judge of those.
func PromptLength(c Codec, body []byte) int {
	if c == CodecJSON {
		return jsonPromptLength(body)
	}
	r := msgpackReader{b: body, budget: MaxValues}
	if found, err := r.enter(tokenField); err != nil || !found {
		return 0
	}
	h, err := r.head()
	switch {
	case err != nil:
		return 0
	case h.kind == kindList:
		return h.size
	case h.kind == kindBytes:
		return h.size / 4
	}
	return 0
}

// jsonPromptLength looks for the key in the outermost object and counts the
// commas of its list.
func jsonPromptLength(b []byte) int {
	depth := 0
	key := true // a string that begins here would be a key
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '{', '[':
			depth++
			key = b[i] == '{'
		case '}', ']':
			depth--
		case ',':
			key = true
		case ':':
			key = false
		case '"':
			end := stringEnd(b, i+1)
			if depth == 1 && key && string(b[i+1:min(end, len(b))]) == tokenField {
				return countList(b, end+1)
			}
			i = end
		}
	}
	return 0
}

// stringEnd is the offset of the quote that closes a string whose text begins at from, or the end of b.
func stringEnd(b []byte, from int) int {
	for i := from; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return len(b)
}

// countList counts the elements of the flat list that comes next, behind a colon.
func countList(b []byte, from int) int {
	n, inside, element := 0, false, false
	for _, c := range b[min(from, len(b)):] {
		switch c {
		case ' ', '\t', '\n', '\r':
		case ':':
			if inside {
				return 0
			}
		case '[':
			if inside {
				return 0
			}
			inside = true
		case ',', ']':
			if !inside {
				return 0
			}
			if element {
				n++
			}
			if c == ']' {
				return n
			}
			element = false
		default:
			if !inside {
				return 0
			}
			element = true
		}
	}
	return 0
}

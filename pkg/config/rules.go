package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"dynworker/internal/logging/redact"
)

// The rules of single keys. Each gets a value of its key's type and returns
// the reason, without key and place, when it does not hold. Reasons never
// quote what may be secret.

// checkValue applies everything that is known about k alone.
func checkValue(k *key, v any) error {
	if s, ok := v.(string); ok && k.choices != nil && !slices.Contains(k.choices, s) {
		if why := k.refused[s]; why != "" {
			return &valueError{kind: ErrUnsupported, reason: why}
		}
		return &valueError{
			kind:       ErrValue,
			reason:     fmt.Sprintf("%s is not one of %s", quote(s), strings.Join(k.choices, ", ")),
			suggestion: nearest(s, k.choices),
		}
	}
	if d, ok := v.(time.Duration); ok && d < 0 {
		return fmt.Errorf("%s is negative", formatDuration(d))
	}
	if s, ok := v.(string); ok && strings.ContainsRune(s, 0) {
		return errors.New("holds a zero byte")
	}
	if k.check == nil {
		return nil
	}
	return k.check(v)
}

// valueError is a reason with a kind other than ErrValue, or with a
// suggestion.
type valueError struct {
	kind       error
	reason     string
	suggestion string
	err        error
}

func (e *valueError) Error() string { return e.reason }
func (e *valueError) Unwrap() error { return e.err }

// quote shows a wrong value, cut to a length that fits into a line.
func quote(s string) string {
	const limit = 80
	s = redact.URLs(s)
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return strconv.Quote(s)
}

func atLeast(low int) func(any) error {
	return func(v any) error {
		if n := v.(int); n < low {
			return fmt.Errorf("%d is less than %d", n, low)
		}
		return nil
	}
}

func between(low, high int) func(any) error {
	return func(v any) error {
		if n := v.(int); n < low || n > high {
			return fmt.Errorf("%d is not in the range %d to %d", n, low, high)
		}
		return nil
	}
}

func positive(v any) error {
	if v.(time.Duration) == 0 {
		return errors.New("must be longer than 0s")
	}
	return nil
}

func aboveZero(v any) error {
	if f := v.(float64); f <= 0 {
		return fmt.Errorf("%v is not above 0", f)
	}
	return nil
}

func wholeSeconds(v any) error {
	d := v.(time.Duration)
	if d < time.Second || d%time.Second != 0 {
		return fmt.Errorf("%s is not a whole number of seconds, at least 1s", formatDuration(d))
	}
	return nil
}

func notBlank(v any) error {
	if strings.TrimSpace(v.(string)) == "" {
		return errors.New("is empty")
	}
	return nil
}

// name accepts what can stand in an etcd key, a NATS subject and a URL path
// without being taken for a separator or a wildcard.
func name(v any) error {
	for _, r := range v.(string) {
		if unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune("/*>", r) {
			return fmt.Errorf("%s holds %q, which cannot be part of a name", quote(v.(string)), r)
		}
	}
	return nil
}

func nonEmptyName(v any) error {
	if err := notBlank(v); err != nil {
		return err
	}
	return name(v)
}

// nonEmptyLabel is a name without dots: component and endpoint are separated
// by dots in addresses and subjects.
func nonEmptyLabel(v any) error {
	if strings.Contains(v.(string), ".") {
		return fmt.Errorf("%s holds a dot, which cannot be part of this name", quote(v.(string)))
	}
	return nonEmptyName(v)
}

// fullEndpoint splits dyn://namespace.component.endpoint, where the scheme may
// be missing. ok is false for a plain endpoint name.
func fullEndpoint(s string) (parts [3]string, ok bool, err error) {
	rest, scheme := strings.CutPrefix(s, "dyn://")
	if !scheme && !strings.Contains(rest, ".") {
		return parts, false, nil
	}
	fields := strings.Split(rest, ".")
	if len(fields) != 3 {
		return parts, true, fmt.Errorf("%s is not of the form dyn://namespace.component.endpoint", quote(s))
	}
	for i, f := range fields {
		if err := nonEmptyLabel(f); err != nil {
			return parts, true, fmt.Errorf("%s is not of the form dyn://namespace.component.endpoint: a part %w", quote(s), err)
		}
		parts[i] = f
	}
	return parts, true, nil
}

func oneWord(v any) error {
	if strings.ContainsFunc(v.(string), unicode.IsSpace) {
		return fmt.Errorf("%s holds white space", quote(v.(string)))
	}
	return nil
}

func words(v any) error {
	seen := map[string]bool{}
	for _, s := range v.([]string) {
		if s == "" {
			return errors.New("holds an empty name")
		}
		if err := oneWord(s); err != nil {
			return err
		}
		if seen[s] {
			return fmt.Errorf("holds %s twice", quote(s))
		}
		seen[s] = true
	}
	return nil
}

func endpointTypes(v any) error {
	list := v.([]string)
	if len(list) == 0 {
		return errors.New("is empty; write none for a worker that no API serves")
	}
	if err := words(v); err != nil {
		return err
	}
	known := []string{"chat", "completions", "none"}
	for _, s := range list {
		if !slices.Contains(known, s) {
			return &valueError{kind: ErrValue, reason: fmt.Sprintf("%s is not one of chat, completions, none", quote(s)), suggestion: nearest(s, known)}
		}
		if s == "none" && len(list) > 1 {
			return errors.New("none stands beside other types")
		}
	}
	return nil
}

func command(v any) error {
	if list := v.([]string); len(list) > 0 && strings.TrimSpace(list[0]) == "" {
		return errors.New("begins with an empty program name")
	}
	return noZeroBytes(v.([]string))
}

func noZeroBytes(list []string) error {
	for i, s := range list {
		if strings.ContainsRune(s, 0) {
			return fmt.Errorf("entry %d holds a zero byte", i+1)
		}
	}
	return nil
}

// environment does not quote entries: an entry that is wrong may be a secret
// in the wrong place.
func environment(v any) error {
	seen := map[string]bool{}
	for i, s := range v.([]string) {
		name, _, ok := strings.Cut(s, "=")
		switch {
		case !ok || name == "" || strings.ContainsFunc(name, unicode.IsSpace):
			return fmt.Errorf("entry %d is not of the form KEY=VALUE", i+1)
		case seen[name]:
			return fmt.Errorf("sets %s twice", name)
		}
		seen[name] = true
	}
	return noZeroBytes(v.([]string))
}

func port(s string) error {
	if n, err := strconv.ParseUint(s, 10, 16); err != nil || strconv.FormatUint(n, 10) != s {
		return fmt.Errorf("port %s is not a number from 0 to 65535", quote(s))
	}
	return nil
}

func hostPort(v any) error {
	host, p, err := net.SplitHostPort(v.(string))
	if err != nil || strings.ContainsFunc(host, unicode.IsSpace) {
		return fmt.Errorf("%s is not of the form host:port", quote(v.(string)))
	}
	return port(p)
}

func hostMaybePort(v any) error {
	s := v.(string)
	if s == "" {
		return nil
	}
	if strings.ContainsAny(s, "/?#@") || strings.ContainsFunc(s, unicode.IsSpace) {
		return fmt.Errorf("%s is not a host or host:port; a URL has no place here", quote(redact.Address(s)))
	}
	if _, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil || !strings.Contains(s, ":") {
		return nil
	}
	if host, p, err := net.SplitHostPort(s); err == nil && (p == "0" || host == "") {
		return fmt.Errorf("%s is not an address that others can reach", quote(s))
	}
	return hostPort(v)
}

func maybeIP(v any) error {
	s := v.(string)
	if s == "" {
		return nil
	}
	if _, err := netip.ParseAddr(s); err != nil {
		return fmt.Errorf("%s is not an IP address", quote(s))
	}
	return nil
}

// httpPath takes clean literal paths only, so that a path cannot shadow
// another one or be a pattern of the router.
func httpPath(v any) error {
	s := v.(string)
	if !strings.HasPrefix(s, "/") || s == "/" || strings.Contains(s, "//") || strings.HasSuffix(s, "/") || strings.ContainsAny(s, "?#{}% ") {
		return fmt.Errorf("%s is not a plain path such as /health", quote(s))
	}
	return nil
}

// address checks one network address. The reason does not quote it, since a
// user part may be anywhere in something that is not quite an address.
func address(s string, schemes ...string) error {
	u, err := url.Parse(s)
	if err != nil {
		return errors.New("cannot be read as an address")
	}
	if !slices.Contains(schemes, u.Scheme) {
		return fmt.Errorf("does not begin with %s", strings.Join(schemes, ":// or ")+"://")
	}
	if u.Hostname() == "" {
		return errors.New("has no host")
	}
	if u.Port() != "" {
		return port(u.Port())
	}
	return nil
}

// addresses checks a list and quotes a wrong entry only where nothing in the
// list can be secret: a comma in a password looks like the end of an entry.
func addresses(list []string, schemes ...string) error {
	secret := strings.Contains(strings.Join(list, ""), "@")
	for i, s := range list {
		s = strings.TrimSpace(s)
		err := address(s, schemes...)
		switch {
		case err == nil:
		case secret:
			return fmt.Errorf("address %d %w", i+1, err)
		default:
			return fmt.Errorf("%s %w", quote(s), err)
		}
	}
	return nil
}

func natsServer(v any) error {
	return addresses(strings.Split(v.(string), ","), "nats", "tls")
}

// etcdEndpoints accepts host:port without a scheme, as etcd's own clients do.
// The client decides about TLS by the first endpoint, so they must be alike.
func etcdEndpoints(v any) error {
	list := v.([]string)
	if len(list) == 0 {
		return errors.New("is empty")
	}
	urls := make([]string, len(list))
	for i, s := range list {
		if strings.Contains(s, "@") {
			return errors.New("holds a user; that belongs into etcd.username and etcd.password")
		}
		if isHTTPS(s) != isHTTPS(list[0]) {
			return errors.New("mixes http and https")
		}
		urls[i] = etcdURL(s)
	}
	return addresses(urls, "http", "https")
}

func etcdURL(s string) string {
	if strings.Contains(s, "://") {
		return s
	}
	return "http://" + s
}

func isHTTPS(s string) bool { return strings.HasPrefix(s, "https://") }

// hasUser reports whether an address of NATS carries a user or a token.
func hasUser(server string) bool {
	for _, s := range strings.Split(server, ",") {
		if u, err := url.Parse(strings.TrimSpace(s)); err == nil && u.User != nil {
			return true
		}
	}
	return false
}

// IsPEM reports whether a setting that is either a file name or PEM text is
// the latter.
func IsPEM(s string) bool { return strings.HasPrefix(strings.TrimSpace(s), "-----BEGIN ") }

func pemOrFile(v any) error {
	if s := v.(string); !IsPEM(s) && strings.ContainsAny(s, "\n\r") {
		return errors.New("has several lines but is not PEM text")
	}
	return nil
}

// payload runs after @file was replaced by its content.
func payload(v any) error {
	s := v.(string)
	if s == "" || strings.HasPrefix(s, "@") {
		return nil
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(s), &m); err != nil || m == nil {
		return errors.New("is not a JSON object")
	}
	return nil
}

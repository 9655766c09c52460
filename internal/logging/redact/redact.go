// Package redact takes secrets out of text before people see it.
//
// It is used wherever a setting or an address ends up in a log line, an error
// or a dump. All functions are pure and err on the
// side of hiding too much. It imports the standard library only, so that every
// package of the worker may use it.
package redact

import (
	"regexp"
	"strings"
)

// Mark stands where a secret was. An empty secret stays empty, so that a dump
// still shows whether one was set.
const Mark = "<secret>"

// Secret returns Mark for any text but the empty one.
func Secret(s string) string {
	if s == "" {
		return ""
	}
	return Mark
}

// userinfo is greedy up to the last @ of a word: a password may hold an
// unescaped @ or slash, and then a strict parser would see it as host or path.
var userinfo = regexp.MustCompile(`://\S*@`)

// URLs replaces the user part of every URL in s: nats://user:pw@host becomes
// nats://<secret>@host. Text without URLs comes back unchanged. In a list
// without spaces everything before the last @ goes, because a password may
// hold the separator.
func URLs(s string) string {
	return userinfo.ReplaceAllString(s, "://"+Mark+"@")
}

// Address is URLs for a setting that is known to be an address, where the
// scheme may be missing: user:pw@host becomes <secret>@host.
func Address(s string) string {
	at := strings.LastIndexByte(s, '@')
	if at < 0 {
		return s
	}
	head, _, ok := strings.Cut(s[:at], "://")
	if !ok {
		return Mark + s[at:]
	}
	return head + "://" + Mark + s[at:]
}

// Named hides value when name looks like the name of a secret (HF_TOKEN,
// db_password, --api-key), and the user part of URLs otherwise.
func Named(name, value string) string {
	if SecretName(name) {
		return Secret(value)
	}
	return URLs(value)
}

// SecretName reports whether a setting, variable or flag of this name is
// likely to hold a secret. Names are compared word by word, so that
// max_num_tokens and tokenizer are not taken for tokens.
func SecretName(name string) bool {
	words := strings.FieldsFunc(strings.ToLower(name), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	for i, w := range words {
		switch w {
		case "token", "password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "nkey", "seed", "apikey", "authorization":
			// A path, an id or a count of the thing is not the thing.
			if i+1 < len(words) {
				switch words[i+1] {
				case "path", "file", "dir", "id", "ids", "delay", "count", "limit", "size", "budget":
					continue
				}
			}
			// The seed of a random generator is no secret; NATS calls its private keys seeds too.
			if w == "seed" && !strings.Contains(strings.ToLower(name), "nkey") && !strings.Contains(strings.ToLower(name), "nats") {
				continue
			}
			return true
		case "key":
			if i > 0 {
				switch words[i-1] {
				case "api", "access", "private", "secret", "auth", "signing", "encryption", "license":
					return true
				}
			}
		}
	}
	return false
}

// Args redacts a command line: --token abc, --token=abc, TOKEN=abc and the user
// part of URLs. The input is not changed.
func Args(args []string) []string {
	out := make([]string, len(args))
	hideNext := false
	for i, a := range args {
		name, value, assigned := strings.Cut(a, "=")
		switch {
		case hideNext && !strings.HasPrefix(a, "--"):
			out[i], hideNext = Secret(a), false
		case assigned:
			out[i], hideNext = name+"="+Named(name, value), false
		default:
			out[i], hideNext = URLs(a), strings.HasPrefix(a, "-") && SecretName(a)
		}
	}
	return out
}

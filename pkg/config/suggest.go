package config

import "strings"

// nearest finds the candidate that was probably meant, or nothing: one slip of
// the finger for every three letters, three at most.
func nearest(s string, candidates []string) string {
	best, limit := "", min(max(len(s)/3, 1), 3)
	for _, c := range candidates {
		d := distance(strings.ToLower(s), strings.ToLower(c), limit)
		if d > limit || d == limit && best != "" || d >= len(c) {
			continue
		}
		best, limit = c, d
	}
	return best
}

// nearestKey finds a key or section for an unknown name: a similar name in the
// same place first, then a similar name altogether, then the same last word
// elsewhere.
func nearestKey(name string) string {
	var all []string
	for _, k := range keys {
		all = append(all, k.name)
	}
	for s := range sections {
		all = append(all, s)
	}
	parent, last := split(name)
	var siblings []string
	for _, c := range all {
		if p, l := split(c); p == parent {
			siblings = append(siblings, l)
		}
	}
	if near := nearest(last, siblings); near != "" {
		if parent == "" {
			return near
		}
		return parent + "." + near
	}
	if near := nearest(name, all); near != "" {
		return near
	}
	elsewhere := ""
	for _, k := range keys {
		if _, l := split(k.name); l == last {
			if elsewhere != "" {
				return "" // not clear which
			}
			elsewhere = k.name
		}
	}
	return elsewhere
}

func split(name string) (parent, last string) {
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		return name[:i], name[i+1:]
	}
	return "", name
}

// distance counts insertions, deletions, replacements and swaps of neighbours
// that turn a into b; anything above limit is limit+1.
func distance(a, b string, limit int) int {
	if len(a) > 64 || len(b) > 64 || len(a)-len(b) > limit || len(b)-len(a) > limit {
		return limit + 1
	}
	var before, prev, cur [65]int
	for j := range len(b) + 1 {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], before[j-2]+1)
			}
		}
		before, prev = prev, cur
	}
	return min(prev[len(b)], limit+1)
}

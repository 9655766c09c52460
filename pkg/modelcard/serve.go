package modelcard

import (
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
)

// urlPrefix and baseSuffix are parts of the path under which Dynamo's workers
// serve model files; the suffix stands for "no adapter".
const (
	urlPrefix  = "/v1/metadata/"
	baseSuffix = "_base"
)

// Hosting is where the files of a model are served.
type Hosting struct {
	// Address is the "host:port" under which frontends reach the server.
	Address string
	// Namespace, Component and Endpoint of the worker.
	Namespace, Component, Endpoint string
}

// URL is the address of a file of the model with the given slug. Its last
// segment becomes the file's name at the frontend.
func (h Hosting) URL(slug, name string) string {
	return "http://" + h.Address + h.dir(slug, url.PathEscape) + url.PathEscape(name)
}

// dir is the path of a model's files, up to and with the last slash.
func (h Hosting) dir(slug string, escape func(string) string) string {
	segments := []string{h.Namespace, h.Component, h.Endpoint, slug, baseSuffix}
	for i := range segments {
		segments[i] = escape(segments[i])
	}
	return urlPrefix + strings.Join(segments, "/") + "/"
}

// Handler serves the files of the card with the given slug, from memory:
// GET and HEAD, and 404 for whatever the card does not name. onGet, which may
// be nil, hears of every file that was asked for with GET.
func (m *Model) Handler(h Hosting, slug string, onGet func(name string)) http.Handler {
	files := make(map[string]*file)
	if !m.localOnly {
		dir := h.dir(slug, func(s string) string { return s })
		for _, fs := range [][]*file{m.extras, m.slots()} {
			for _, f := range fs {
				files[dir+f.name] = f
			}
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f := files[r.URL.Path]
		if f == nil {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			w.Header().Set("Content-Length", "9")
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write([]byte("Not found"))
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET,HEAD")
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(f.size, 10))
		w.Header().Set("ETag", `"`+f.checksum+`"`)
		w.WriteHeader(http.StatusOK)
		if r.Method == http.MethodHead {
			return
		}
		if onGet != nil {
			onGet(f.name)
		}
		_, _ = w.Write(f.data) // a frontend that left asks again
	})
}

func hasJSONSuffix(name string) bool { return strings.EqualFold(filepath.Ext(name), ".json") }

package modelcard

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"dynworker/pkg/protocol"
)

// cardFiles lists every file of a card.
func cardFiles(c *protocol.Card) []protocol.File {
	files := append([]protocol.File{}, c.ExtraFiles...)
	for _, f := range []*protocol.TaggedFile{c.ModelInfo, c.Tokenizer, c.PromptFormatter, c.GenConfig} {
		if f != nil {
			files = append(files, f.File)
		}
	}
	if c.ChatTemplate != nil {
		files = append(files, c.ChatTemplate.File)
	}
	return files
}

// Whatever the card names can be fetched under the URL it gives, and has the
// size and checksum it gives, even after the folder is gone.
func TestServedFilesAreWhatTheCardSays(t *testing.T) {
	dir := modelDir(t, map[string]string{nameTemplate: "{{ messages }}", "a b%.txt": "odd name", "empty.txt": "", "vocab.txt": "v"})
	m := load(t, dir, Options{})
	require.NoError(t, os.RemoveAll(dir))

	var mu sync.Mutex
	gets := make(map[string]int)
	var handler http.Handler
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handler.ServeHTTP(w, r) }))
	defer srv.Close()
	client := srv.Client()
	h := Hosting{Address: strings.TrimPrefix(srv.URL, "http://"), Namespace: "my ns", Component: "backend", Endpoint: "generate"}
	card, err := m.Card(Spec{Name: "Org/Tiny"}, &h)
	require.NoError(t, err)
	handler = m.Handler(h, card.Slug, func(name string) {
		mu.Lock()
		defer mu.Unlock()
		gets[name]++
	})

	require.Equal(t, srv.URL+"/v1/metadata/my%20ns/backend/generate/org_tiny/_base/config.json", card.ModelInfo.File.Path)
	files := cardFiles(&card)
	require.Len(t, files, 8)
	for _, f := range files {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			req, err := http.NewRequestWithContext(t.Context(), method, f.Path, nil)
			require.NoError(t, err)
			res, err := client.Do(req)
			require.NoError(t, err)
			body, err := io.ReadAll(res.Body)
			require.NoError(t, err)
			require.NoError(t, res.Body.Close())
			require.Equal(t, 200, res.StatusCode, f.Path)
			require.EqualValues(t, f.Size, res.ContentLength, f.Path)
			if method == http.MethodHead {
				require.Empty(t, body)
				continue
			}
			require.Len(t, body, int(f.Size))
			require.Equal(t, f.Checksum, fmt.Sprintf("blake3:%x", blake3.Sum256(body)))
		}
		u, err := url.Parse(f.Path)
		require.NoError(t, err)
		mu.Lock()
		require.Equal(t, 1, gets[filepath.Base(u.Path)], "GETs are counted, HEADs are not: %s", f.Path)
		mu.Unlock()
	}
}

func TestHandlerRefusesTheRest(t *testing.T) {
	dir := modelDir(t, map[string]string{"model.safetensors": "weights", ".secret": "s", "README.md": "r"})
	m := load(t, dir, Options{})
	h := Hosting{Address: "x:1", Namespace: "ns", Component: "c", Endpoint: "e"}
	heard := 0
	handler := m.Handler(h, "tiny", func(string) { heard++ })
	do := func(method, path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(method, "/", nil)
		r.URL = &url.URL{Path: path}
		handler.ServeHTTP(w, r)
		return w
	}
	const base = "/v1/metadata/ns/c/e/tiny/_base/"
	for _, path := range []string{
		base + "model.safetensors", base + ".secret", base + "README.md", base + "nope", base, base + "../_base/config.json",
		base + "config.json/", "/v1/metadata/ns/c/e/tiny/lora/config.json", "/v1/metadata/ns/c/e/other/_base/config.json",
		"/v1/metadata/other/c/e/tiny/_base/config.json", "/v1/metadata/", "/config.json", base + "/config.json", dir + "/config.json",
	} {
		w := do(http.MethodGet, path)
		require.Equal(t, 404, w.Code, path)
		require.Equal(t, "Not found", w.Body.String())
	}
	w := do(http.MethodPost, base+nameConfig)
	require.Equal(t, 405, w.Code)
	require.Equal(t, "GET,HEAD", w.Header().Get("Allow"))
	require.Zero(t, heard)
	require.Equal(t, 200, do(http.MethodGet, base+nameConfig).Code)
	require.Equal(t, 1, heard)

	require.Equal(t, 200, func() int { // no listener for GETs
		handler = m.Handler(h, "tiny", nil)
		return do(http.MethodGet, base+nameConfig).Code
	}())
	handler = load(t, dir, Options{LocalOnly: true}).Handler(h, "tiny", nil)
	require.Equal(t, 404, do(http.MethodGet, base+nameConfig).Code, "nothing is kept for local paths")
}

func TestURLOfIPv6Host(t *testing.T) {
	h := Hosting{Address: "[2001:db8::7]:9090", Namespace: "n", Component: "c", Endpoint: "e"}
	require.Equal(t, "http://[2001:db8::7]:9090/v1/metadata/n/c/e/s/_base/config.json", h.URL("s", nameConfig))
}

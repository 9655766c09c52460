package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
)

// tokenizers are the files of which the model folder needs one.
var tokenizers = []string{"tokenizer.json", "tiktoken.model", "tokenizer.model"}

// CheckFiles looks whether the files and folders that the configuration names
// are there. stat defaults to os.Stat. Nothing is opened and nothing is
// downloaded. The error is an Errors, each with the path that was tried.
//
// It is apart from Load because a configuration is often checked on another
// machine than the one that serves with it. The engine file is not among the
// files, since Resolve reads it.
func (c *Config) CheckFiles(stat func(string) (fs.FileInfo, error)) error {
	if stat == nil {
		stat = os.Stat
	}
	var errs Errors
	problem := func(key, reason string, err error) {
		errs = append(errs, &Problem{Key: key, Origin: c.origins[key], Kind: ErrFile, Reason: reason, Err: err})
	}
	// look reports whether path is there.
	look := func(key, path string, folder bool) bool {
		info, err := stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) && key == "model.path" && c.isHubName():
			problem(key, fmt.Sprintf("%s looks like a name on the Hugging Face hub, but nothing is downloaded: give the folder that holds the model", quote(path)), err)
		case errors.Is(err, fs.ErrNotExist):
			problem(key, fmt.Sprintf("%s does not exist", quote(path)), err)
		case err != nil:
			problem(key, fmt.Sprintf("%s cannot be looked at: %s", quote(path), fileReason(err)), err)
		case folder && !info.IsDir():
			problem(key, fmt.Sprintf("%s is not a folder", quote(path)), nil)
		case !folder && info.IsDir():
			problem(key, fmt.Sprintf("%s is a folder", quote(path)), nil)
		default:
			return true
		}
		return false
	}

	const model = "model.path"
	if c.Model.Path != "" && look(model, c.Model.Path, true) {
		look(model, filepath.Join(c.Model.Path, "config.json"), false)
		found := false
		for _, name := range tokenizers {
			info, err := stat(filepath.Join(c.Model.Path, name))
			found = found || err == nil && !info.IsDir()
		}
		if !found {
			problem(model, fmt.Sprintf("%s holds none of %s", quote(c.Model.Path), joinOr(tokenizers)), nil)
		}
	}
	for _, k := range keys {
		if !k.path || k.name == model {
			continue
		}
		path := k.value(c).(string)
		switch {
		case path == "" || IsPEM(path) || k.name == payloadKey || k.name == engineFileKey:
		case k.name == "engine.sim.calls_log": // made when it is not there
			look(k.name, filepath.Dir(path), true)
		case k.secret:
			// A key in the wrong form may sit where a file name should be.
			if info, err := stat(path); err != nil || info.IsDir() {
				problem(k.name, "is neither PEM text nor a file that is there", err)
			}
		default:
			look(k.name, path, false)
		}
	}
	for _, a := range c.LoRA {
		if _, err := stat(a.Path); err != nil {
			problem("lora", fmt.Sprintf("adapter %s: %s cannot be looked at: %s", quote(a.Name), quote(a.Path), fileReason(err)), err)
		}
	}
	return errs.err()
}

// isHubName reports whether the model's path is of the form organisation/name.
func (c *Config) isHubName() bool {
	path := c.Model.Path
	if o := c.origins["model.path"]; o.Kind == FromFile {
		// Load made it one below the folder of the file.
		if rest, err := filepath.Rel(filepath.Dir(o.Name), path); err == nil {
			path = rest
		}
	}
	return hubName.MatchString(path)
}

var hubName = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$`)

func joinOr(list []string) string {
	out := ""
	for i, s := range list {
		switch {
		case i == 0:
		case i == len(list)-1:
			out += " and "
		default:
			out += ", "
		}
		out += s
	}
	return out
}

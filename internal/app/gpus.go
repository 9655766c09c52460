package app

import (
	"io/fs"
	"regexp"
	"strings"
)

// VisibleGPUs counts the GPUs that a process with this environment may use; 0 when there is no telling. dev is the folder of device files.
func VisibleGPUs(environ []string, dev fs.FS) int {
	for i := len(environ) - 1; i >= 0; i-- { // the last of a doubled variable counts
		list, ok := strings.CutPrefix(environ[i], "CUDA_VISIBLE_DEVICES=")
		if !ok {
			continue
		}
		n := 0
		for device := range strings.SplitSeq(list, ",") {
			device = strings.TrimSpace(device)
			if device == "" || strings.HasPrefix(device, "-") || strings.EqualFold(device, "NoDevFiles") {
				break // CUDA stops at the first name that is none
			}
			n++
		}
		return n
	}
	entries, err := fs.ReadDir(dev, ".")
	if err != nil {
		return 0
	}
	n := 0
	for _, e := range entries {
		if gpuDevice.MatchString(e.Name()) {
			n++
		}
	}
	return n
}

var gpuDevice = regexp.MustCompile(`^nvidia[0-9]+$`)

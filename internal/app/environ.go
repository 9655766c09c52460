package app

import "strings"

// EngineEnviron is the environment of a TensorRT-LLM engine: the worker's own, what engine.env sets on top, and PYTHONHASHSEED, without which the ranks of an engine would hash differently.
//
// What an outer MPI or Slurm job tells its own processes is left out, since the engine starts ranks of its own and would try to join that job. Settings for MPI itself stay (OMPI_MCA_coll_ucc_enable, say), and so does whatever engine.env says.
func EngineEnviron(environ, set []string) []string {
	out := make([]string, 0, len(environ)+len(set)+1)
	seeded := false
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if ofOuterJob(name) {
			continue
		}
		seeded = seeded || name == hashSeed
		out = append(out, kv)
	}
	for _, kv := range set {
		seeded = seeded || strings.HasPrefix(kv, hashSeed+"=")
		out = append(out, kv)
	}
	if !seeded {
		out = append(out, hashSeed+"=0")
	}
	return out
}

const hashSeed = "PYTHONHASHSEED"

// ofOuterJob recognises what mpirun, srun and their daemons set for the processes that they start.
func ofOuterJob(name string) bool {
	if parameter, ok := strings.CutPrefix(name, "OMPI_MCA_"); ok {
		// Parameters are the user's, but for those with which Open MPI's daemons describe the job.
		for _, own := range []string{"orte_", "prte_", "ess", "pmix", "initial_wdir", "shmem_RUNTIME_QUERY_hint"} {
			if strings.HasPrefix(parameter, own) {
				return true
			}
		}
		return false
	}
	if strings.HasPrefix(name, "PMIX_MCA_") {
		return false
	}
	for _, prefix := range []string{"OMPI_", "PMIX_", "PMI_", "SLURM_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

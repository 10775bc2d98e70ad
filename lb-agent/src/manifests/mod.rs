//! The source that needs no Kubernetes: a folder of manifests.

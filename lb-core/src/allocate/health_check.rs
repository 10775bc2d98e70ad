//! Allocates `healthCheckNodePort`, the port on which a load balancer checks whether the node has endpoints of a
//! Service. It comes from the range of node ports, as with an API server.

use super::Computation;
use crate::{api, convert::ConvertError, fnv::fnv1a};

const FIELD: &str = "spec.healthCheckNodePort";

impl Computation<'_> {
    /// The `healthCheckNodePort` that the Service should have, if any; `uses` are its node ports.
    pub(super) fn health_check_node_port(
        &self,
        spec: &api::ServiceSpec,
        uses: &[Option<u16>],
    ) -> Result<Option<u16>, ConvertError> {
        if !spec.has_health_check_port() {
            return Ok(None);
        }
        let is_mine = |port: &u16| !uses.contains(&Some(*port));
        if let Some(port) = self.explicit_health_check_node_port(spec)? {
            return if is_mine(&port) { Ok(Some(port)) } else { Err(self.object.duplicate(FIELD, port)) };
        }
        let before = self.allocator.services.get(self.name).and_then(|known| known.health_check_node_port);
        match before.filter(is_mine) {
            Some(port) => Ok(Some(port)),
            None => {
                let hash = fnv1a(&[&self.name.namespace, &self.name.name, "healthCheckNodePort"]);
                self.free_node_port(hash, |port| uses.contains(&Some(port)), FIELD).map(Some)
            }
        }
    }

    /// Checks the `healthCheckNodePort` that the Service requests: in range and not taken. Returns it.
    pub(super) fn explicit_health_check_node_port(
        &self,
        spec: &api::ServiceSpec,
    ) -> Result<Option<u16>, ConvertError> {
        let asked = spec.health_check_node_port.filter(|port| *port != 0 && spec.has_health_check_port());
        asked.map(|port| self.valid_node_port(FIELD.to_owned(), port)).transpose()
    }
}

//! The API server's rules for a port that involve the other ports of the same list, or the type of the Service.

use std::collections::BTreeSet;

use super::{FieldError, duplicate, forbidden, invalid, port_number, required};
use crate::api::ServiceSpec;

/// Checks the names of the ports of one list, in their order: no two names may be equal, and no name may be empty if
/// names are required.
#[derive(Debug)]
pub struct PortNames<'a> {
    required: bool,
    seen: BTreeSet<&'a str>,
}

impl<'a> PortNames<'a> {
    /// Creates a check for the ports of an EndpointSlice: one of them may have no name.
    pub const fn optional() -> Self {
        Self { required: false, seen: BTreeSet::new() }
    }

    /// Creates a check for this number of ports of a Service or of Endpoints: only a single port may have no name.
    pub const fn of_service(ports: usize) -> Self {
        Self { required: ports > 1, seen: BTreeSet::new() }
    }

    /// Checks the next name; empty is unset.
    ///
    /// # Errors
    ///
    /// The error text, in the format of the API server's.
    pub fn check(&mut self, name: &'a str) -> Result<(), String> {
        if name.is_empty() && self.required {
            Err(required("each of several ports needs a name"))
        } else if self.seen.insert(name) {
            Ok(())
        } else {
            Err(duplicate(name))
        }
    }
}

/// Returns the node port that a new Service requests for each of its ports, and one error for each node port that
/// breaks a rule. The function does not check whether the node ports are free.
pub fn node_ports(spec: &ServiceSpec) -> (Vec<Option<u16>>, Vec<FieldError>) {
    let (mut errors, mut seen) = (Vec::new(), BTreeSet::new());
    let ports = spec.ports.iter().flatten().enumerate().map(|(index, port)| {
        let number = port.node_port.filter(|number| *number != 0)?;
        let why = match port_number(number) {
            _ if !spec.has_node_ports() => {
                forbidden(format_args!("may not be used when `type` is '{}'", spec.service_type()))
            }
            Err(why) => invalid(number, why),
            Ok(valid) if seen.insert((valid, port.protocol_or_default())) => return Some(valid),
            Ok(_) => duplicate(number),
        };
        errors.push(FieldError::new(format!("spec.ports[{index}].nodePort"), why));
        None
    });
    (ports.collect(), errors)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_several_ports_of_a_service_are_required_and_differ() {
        let mut names = PortNames::of_service(3);
        assert_eq!(names.check(""), Err("Required value: each of several ports needs a name".to_owned()));
        assert_eq!(names.check("a"), Ok(()));
        assert_eq!(names.check("a"), Err("Duplicate value: \"a\"".to_owned()));
        assert_eq!(PortNames::of_service(1).check(""), Ok(()));
        let mut names = PortNames::optional();
        assert_eq!((names.check(""), names.check("")), (Ok(()), Err("Duplicate value: \"\"".to_owned())));
    }

    #[test]
    fn node_ports_are_numbers_that_differ_within_a_protocol() {
        let requested = |of: &str| {
            let ports = json!([
                {"port": 1}, {"port": 2, "nodePort": 0}, {"port": 3, "nodePort": 30000},
                {"port": 4, "nodePort": 30000, "protocol": "UDP"}, {"port": 5, "nodePort": 30000},
                {"port": 6, "nodePort": 65536}, {"port": 7, "nodePort": -1},
            ]);
            let spec: ServiceSpec = serde_json::from_value(json!({"type": of, "ports": ports})).unwrap();
            let (ports, errors) = node_ports(&spec);
            let errors: Vec<String> =
                errors.into_iter().map(|FieldError { field, why }| format!("{field}: {why}")).collect();
            (ports, errors)
        };
        let (ports, errors) = requested("NodePort");
        assert_eq!(ports, [None, None, Some(30000), Some(30000), None, None, None]);
        assert_eq!(
            errors,
            [
                "spec.ports[4].nodePort: Duplicate value: 30000",
                "spec.ports[5].nodePort: Invalid value: 65536: must be between 1 and 65535, inclusive",
                "spec.ports[6].nodePort: Invalid value: -1: must be between 1 and 65535, inclusive",
            ]
        );
        for of in ["ClusterIP", "ExternalName"] {
            let (ports, errors) = requested(of);
            assert_eq!((ports, errors.len()), (vec![None; 7], 5));
            let first = format!("spec.ports[2].nodePort: Forbidden: may not be used when `type` is '{of}'");
            assert_eq!(errors.first(), Some(&first));
        }
    }
}

//! Reads the annotations that limit new connections.

use std::collections::BTreeMap;

use lb_common::{ConnectionLimits, ConnectionRate};

use crate::model::ServiceSettings;

/// The annotation that limits new connections of all clients together, on each node, such as `1000/s`.
pub const MAX_CONNECTIONS: &str = "lb.dev/max-connections";
/// The annotation that limits new connections of each client, on each node, such as `20/s` or `60/m`.
pub const MAX_CONNECTIONS_PER_CLIENT: &str = "lb.dev/max-connections-per-client";

/// The highest limit. A bucket counts the time of one token in whole nanoseconds, so much higher limits would be
/// inexact.
const MOST: u32 = 1_000_000;

/// Sets the limits from the annotations; records invalid annotations.
pub(super) fn read(annotations: &BTreeMap<String, String>, settings: &mut ServiceSettings) {
    let mut of = |name| {
        let text = annotations.get(name)?.trim();
        settings.noted(name, text, rate(text))
    };
    let (service, client) = (of(MAX_CONNECTIONS), of(MAX_CONNECTIONS_PER_CLIENT));
    settings.limits = ConnectionLimits {
        service: service.unwrap_or(ConnectionRate::NONE),
        client: client.unwrap_or(ConnectionRate::NONE),
    };
}

/// A number of connections per second (`20/s`) or minute (`60/m`).
fn rate(text: &str) -> Result<ConnectionRate, String> {
    let parsed = text.split_once('/').and_then(|(number, unit)| {
        let seconds = match unit.trim() {
            "s" => 1,
            "m" => 60,
            _ => return None,
        };
        let connections = number.trim().parse().ok().filter(|number| (1..=MOST).contains(number))?;
        Some(ConnectionRate { connections, seconds })
    });
    parsed.ok_or_else(|| format!("give a number from 1 to {MOST} per second or minute, such as 20/s or 60/m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotations: &[(&str, &str)]) -> (ConnectionLimits, Vec<&'static str>) {
        let owned = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let mut settings = ServiceSettings::default();
        read(&owned.collect(), &mut settings);
        let errors = settings.annotation_errors.into_iter();
        (settings.limits, errors.map(|error| error.annotation).collect())
    }

    const fn limit(connections: u32, seconds: u32) -> ConnectionRate {
        ConnectionRate { connections, seconds }
    }

    #[test]
    fn annotations_set_the_limits() {
        for (service, client, expected) in [
            ("1000/s", "20/s", ConnectionLimits { service: limit(1000, 1), client: limit(20, 1) }),
            (" 1 / s ", "60/m", ConnectionLimits { service: limit(1, 1), client: limit(60, 60) }),
            ("1000000/s", "1/m", ConnectionLimits { service: limit(MOST, 1), client: limit(1, 60) }),
        ] {
            let annotations = [(MAX_CONNECTIONS, service), (MAX_CONNECTIONS_PER_CLIENT, client)];
            assert_eq!(of(&annotations), (expected, vec![]));
        }
        let only_client = ConnectionLimits { service: ConnectionRate::NONE, client: limit(5, 1) };
        assert_eq!(of(&[(MAX_CONNECTIONS_PER_CLIENT, "5/s")]), (only_client, vec![]));
        assert_eq!(of(&[]), (ConnectionLimits::NONE, vec![]));
    }

    #[test]
    fn invalid_limit_is_reported_and_unset() {
        for value in ["20", "0/s", "1000001/s", "-1/s", "20/h", "20/", "/s", "", "1.5/s", "20/s/s"] {
            for name in [MAX_CONNECTIONS, MAX_CONNECTIONS_PER_CLIENT] {
                assert_eq!(of(&[(name, value)]), (ConnectionLimits::NONE, vec![name]), "{value:?}");
            }
        }
    }
}

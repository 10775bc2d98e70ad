//! Checks the syntax of names in Kubernetes (`k8s.io/apimachinery/pkg/util/validation`). Each function returns why a
//! name is invalid; `None` for a valid name.

/// Checks the name of a Service, which must be a DNS label of RFC 1035.
pub fn dns_1035_label(name: &str) -> Option<String> {
    let fits = name.starts_with(|first: char| first.is_ascii_lowercase()) && is_label(name);
    too_long(name, 63).or_else(|| {
        (!fits).then(|| {
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic \
             character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for \
             validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
                .to_owned()
        })
    })
}

/// Checks the name of a namespace or a port, which must be a DNS label of RFC 1123.
pub fn dns_1123_label(name: &str) -> Option<String> {
    too_long(name, 63).or_else(|| {
        (!is_label(name)).then(|| {
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and \
             end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
             '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
                .to_owned()
        })
    })
}

/// Checks the name of most other objects, which must be a DNS subdomain of RFC 1123.
pub fn dns_1123_subdomain(name: &str) -> Option<String> {
    too_long(name, 253).or_else(|| {
        (!name.split('.').all(is_label)).then(|| {
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
             start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
             '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
                .to_owned()
        })
    })
}

/// Checks the name of a `targetPort`, which must be an IANA service name (RFC 6335).
pub fn port_name(name: &str) -> Option<String> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let why = if name.len() > 15 {
        "must be no more than 15 characters"
    } else if name.is_empty() || !name.chars().all(allowed) {
        "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"
    } else if !name.contains(|c: char| c.is_ascii_lowercase()) {
        "must contain at least one letter (a-z)"
    } else if name.contains("--") {
        "must not contain consecutive hyphens"
    } else if name.starts_with('-') || name.ends_with('-') {
        "must not begin or end with a hyphen"
    } else {
        return None;
    };
    Some(why.to_owned())
}

fn is_label(name: &str) -> bool {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.starts_with(alphanumeric)
        && name.ends_with(alphanumeric)
        && name.chars().all(|c| alphanumeric(c) || c == '-')
}

fn too_long(name: &str, limit: usize) -> Option<String> {
    (name.len() > limit).then(|| format!("must be no more than {limit} characters"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_forms_accept_what_kubernetes_accepts() {
        let check = |form: fn(&str) -> Option<String>, good: &[&str], bad: &[&str]| {
            for name in good {
                assert_eq!(form(name), None, "{name:?}");
            }
            for name in bad {
                assert!(form(name).is_some(), "{name:?}");
            }
        };
        check(dns_1035_label, &["web", "w", "my-web-1"], &["", "1web", "-web", "web-", "We", "a.b", "a_b"]);
        check(dns_1123_label, &["web", "123-abc", "0"], &["", "123_abc", "-web", "web-", "a.b"]);
        check(dns_1123_subdomain, &["web", "a.b", "1.2.3"], &["", "a..b", ".a", "a.", "A"]);
        check(port_name, &["http", "p-1", "1a"], &["", "-a", "a-", "a--b", "80", "averyverylongname", "A"]);
        assert!(dns_1035_label(&"a".repeat(64)).is_some() && dns_1035_label(&"a".repeat(63)).is_none());
    }
}
